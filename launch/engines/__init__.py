"""Other people's runtimes: each module turns a LaunchPlan into a running job on one of them."""
