"""Credit methods (GRPO, GAE, ...), each file with those that compare alike; importing this folder registers them."""
