"""Paged attention in CUDA C++, compiled for the GPU at hand when it is first needed."""
