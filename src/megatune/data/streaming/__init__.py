"""Training on data too large to prepare first: a process of each machine reads and tokenises ahead of the steps.

Each machine tokenises its share of the rows, and gets the others' from theirs.

blocks.py    data sets mixed, and cut to blocks of rows on disk
producer.py  the process that holds out the evaluation rows and writes blocks
folder.py    the folder that producer and ranks share: blocks, notes to each other, and waiting for them
sharing.py   how machines share the work of tokenising
stream.py    a rank's end of it: starts the producer, says what is wrong with it, gives the rows of steps
"""
