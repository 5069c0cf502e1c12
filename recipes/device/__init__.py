"""Settings of a device, one file each."""
