"""What is counted, and what was stored before: for statistics, and never for what is answered."""
