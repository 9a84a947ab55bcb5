"""While a job runs: who has called, lives, gets on, waits for whom; what is said of its end, and whether it starts again."""
