"""Moving bytes: slabs of memory (`slots`) and the threads that fill them from disk (`disk`)."""
