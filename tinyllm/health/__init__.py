"""What is wrong with a run, from its history, in plain words with a remedy: for the loop, the report and `show`."""
