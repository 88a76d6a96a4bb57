"""The credit methods, such as GRPO and GAE; importing this folder registers them."""
