"""Small helpers without a subject of their own: files, CPUs, interfaces, signals, ranges."""
