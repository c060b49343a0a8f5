"""What a hit costs: prefixes that were stored and fetched, held against those that were not."""
