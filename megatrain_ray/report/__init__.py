"""Reports on a run: as a page of HTML, and in a terminal."""
