"""The command line. `app` declares the commands; each command's work is in a module of its own that is loaded late."""

import gc

# Before the first import of the command line's libraries: what they define stays for good, and looking through it again
# and again for garbage is a twentieth of the time of `headrace check`.
gc.set_threshold(20_000)
