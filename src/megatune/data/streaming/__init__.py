"""Stream data that is too large to prepare: a process of each machine reads and tokenizes ahead of training.

Each machine tokenizes a part of the rows, and receives the others from the other machines.

blocks.py    mixes data sets, and writes blocks of rows to disk
producer.py  the process that writes blocks, the held-out evaluation rows, and their folder
sharing.py   shares tokenization between machines
stream.py    a rank's interface: starts and monitors the producer, and returns the rows of steps
"""
