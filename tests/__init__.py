"""The tests of kvfold; they mirror `src/kvfold`."""
