"""Tools that write pages of ``docs`` from the code; the site leaves it out."""
