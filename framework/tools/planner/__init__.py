"""What a run will hold, say and take, before it is started: profiles, memory, time, and the search for a layout."""
