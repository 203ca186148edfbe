"""Probe devices and links: order the measurements, repeat those of doubtful devices, and judge the answers."""
