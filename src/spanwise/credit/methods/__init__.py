"""Methods, one file each; importing this folder registers them."""
