"""Paged attention: how decoding rows and prefill chunks attend KV that lies in blocks, one backend a file."""
