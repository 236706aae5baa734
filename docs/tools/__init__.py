"""What writes pages of ``docs`` from the code; the site leaves it out."""
