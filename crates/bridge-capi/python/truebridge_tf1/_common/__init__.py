"""Files that truebridge ships as well, where they are one folder deep too."""
