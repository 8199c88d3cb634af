"""The command line. `app` declares the commands; each command's work is in a module of its own that is loaded late."""
