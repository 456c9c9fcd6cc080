"""Drafters: they propose draft tokens, the learned ones (EAGLE, EAGLE-3) on the device and the suffix drafter on the host."""
