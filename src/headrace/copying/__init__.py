"""Moving bytes: slabs of memory, the threads that fill them from disk, and what takes them to an accelerator."""
