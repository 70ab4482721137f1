"""Finds the files of a data source and reads records and texts from them."""
