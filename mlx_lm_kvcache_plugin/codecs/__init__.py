"""How blocks are encoded: codecs for single tensors, and the packing of whole blocks."""
