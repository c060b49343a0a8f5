"""What is kept in host memory: a tree of blocks, its order of eviction, and its budget."""
