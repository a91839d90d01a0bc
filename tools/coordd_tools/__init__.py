"""What surrounds coordd: measuring it, checking its sources, writing its generated pages.

Each module is a command, ``python -m coordd_tools.<module>``.
"""
