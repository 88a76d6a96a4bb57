"""Steps of multi-turn trajectories: anchors, returns, one vote per trajectory, merged rows."""
