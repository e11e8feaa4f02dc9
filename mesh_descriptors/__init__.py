"""Descriptions of board sets (one mesh descriptor a file) and the function that picks one."""
