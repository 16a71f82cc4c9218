"""Training on data too large to prepare first: a process of each machine reads and tokenises ahead of the steps.

Each machine tokenises its share of the rows, and gets the others' from theirs.

blocks.py    data sets mixed, and cut to blocks of rows on disk
producer.py  the process that writes blocks, the evaluation rows that are held out of them, and their folder
sharing.py   how machines share the work of tokenising
stream.py    a rank's end of it: starts the producer, says what is wrong with it, gives the rows of steps
"""
