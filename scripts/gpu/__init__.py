"""The check of a machine with a GPU: `check` is the command, `bare` and `engine` are what it runs."""
