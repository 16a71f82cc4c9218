"""Training on data too large to prepare first: a process of each machine reads and tokenises ahead of the steps.

state.py     where a stream stands: all that is needed to go on from there
sets.py      the usable samples of one data set, one after the other
blocks.py    data sets mixed, and cut to blocks of rows on disk
folder.py    the folder that producer and ranks share: blocks, and notes to each other
evaluation.py  the rows that are held out before anything is trained
producer.py  the process that writes blocks
steps.py     blocks as the rows of steps
stream.py    a rank's end of it: starts the producer, waits for it, says what is wrong with it
"""
