"""Uploads weights into slots and binds views of the slots as parameters."""
