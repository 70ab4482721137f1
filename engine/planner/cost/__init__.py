"""Predicts the seconds of a step by simulating it on measured rates."""
