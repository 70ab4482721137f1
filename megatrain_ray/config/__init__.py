"""Defines the settings of a run, checks them and reads them from YAML."""
