from distrib_launch.rank.process import main

if __name__ == "__main__":
    raise SystemExit(main())
