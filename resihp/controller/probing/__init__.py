"""Probes of devices and links: the orders to measure, repeated looks at devices in doubt, and judged answers."""
