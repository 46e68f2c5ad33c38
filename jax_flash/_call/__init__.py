"""The record of a call: its options, its operands, and the checks of what a user hands in."""
