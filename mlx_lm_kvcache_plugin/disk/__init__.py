"""The disk tier: immutable records of named arrays, one file each, found by chained keys."""
