"""C code for the CPU: compiled at first use, loaded with ctypes, called with tensors."""
