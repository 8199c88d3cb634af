"""Functions of an examined package, cut out of their source and run with stand-ins. Only ever inside of the jail."""
