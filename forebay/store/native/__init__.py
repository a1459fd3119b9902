"""The store's inner loops in C (`bytes.c`), with numpy and the crc32c package as the other implementation."""
