"""What an operation is: its kind, arguments and their checks, its request, and the handle that it returns."""
