"""The verbs of the command line, one a file: what it is for, its flags, what it does and what it prints."""
