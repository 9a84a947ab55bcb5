from distrib_launch.rank_agent.agent import main

if __name__ == "__main__":
    raise SystemExit(main())
