"""Who is in the job, agreed by all: leases, generations and the stores that hold them.

`decisions`, `opening`, `proposing`, `member` and what they are made of are pure; stores, threads and sockets
are in `memory`, `embedded`, `etcd`, `doors` and `service`.
"""
