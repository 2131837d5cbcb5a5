"""`hieravg demo`: a small job on one machine, hurt on purpose, and its promises checked."""
