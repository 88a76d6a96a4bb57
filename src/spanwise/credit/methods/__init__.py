"""The credit methods, such as GRPO and GAE. Importing this folder registers them."""
