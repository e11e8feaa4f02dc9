"""StableHLO in, StableHLO out: the passes, and the service of workers that runs them."""
