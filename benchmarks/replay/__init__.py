"""Replays traces of real requests through stores, by ids and lengths alone."""
