"""Looks into a prefix cache from other threads: what it holds, and what a prompt would hit."""
