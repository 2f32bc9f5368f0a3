"""What Shoal costs and how fast it is, as ratios taken within one run."""
