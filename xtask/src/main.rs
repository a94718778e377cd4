//! The project's own commands: `cargo xtask …`.

mod api;
mod audit;
mod bill;
mod bundle;
mod check;
mod counts;
mod features;
mod fuzz;
mod header;
mod install;
mod kernels;
mod new_adapter;
mod package;
mod provenance;
mod release;
mod run;
mod site;
mod tensorflow1;
mod tried;
mod venv;
mod version;
mod versions;
mod wheels;

use clap::{Parser, Subcommand};
use std::path::PathBuf;
use std::process::ExitCode;

/// The project's own commands.
#[derive(Parser)]
#[command(name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Make or complete the virtual environments in the target folder, and fetch TensorFlow 1.15.
    Setup,
    /// Check everything that can be checked without a GPU.
    Test,
    /// Write what programs may use of the crates, as lists in fixtures/api.
    Api {
        /// Compare with what is checked in, and change nothing.
        #[arg(long)]
        check: bool,
    },
    /// Check what takes longer than the tests or needs tools beside cargo: undefined behaviour, why misuse does not
    /// compile, threads under many schedules, the interface, and whether the tests notice changes of the code.
    Audit,
    /// Run the conformance suite over the installed frameworks.
    #[command(disable_help_flag = true)]
    Conformance {
        /// The runner's own options: see `cargo xtask conformance --help`.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        options: Vec<String>,
    },
    /// Let the interchange tests of a framework, in a checkout of yours, judge the package.
    #[command(disable_help_flag = true)]
    Judge {
        /// The judge's own options: see `cargo xtask judge --help`.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        options: Vec<String>,
    },
    /// Judge the frameworks' own interchange of tensors, and the package beside it, by programs that need neither.
    #[command(disable_help_flag = true)]
    Scoreboard {
        /// The scoreboard's own options: see `cargo xtask scoreboard --help`.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        options: Vec<String>,
    },
    /// Measure transfers against the frameworks' own.
    #[command(disable_help_flag = true)]
    Bench {
        /// The bench's own options: see `cargo xtask bench --help`.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        options: Vec<String>,
    },
    /// Count the instructions of the host paths under valgrind, and compare with fixtures/counts.json.
    Counts {
        /// Count the paths in Rust alone, which takes a minute.
        #[arg(long)]
        rust: bool,
        /// Write the counts instead.
        #[arg(long)]
        write: bool,
    },
    /// Feed hostile input to the Python package, or to the target that is named: the codec, the C library, the wire.
    #[command(disable_help_flag = true)]
    Fuzz {
        /// The fuzzer's own options: see `cargo xtask fuzz --help`.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        options: Vec<String>,
    },
    /// Write what an adapter for a framework needs: its crate, and its rows in the tables.
    NewAdapter(new_adapter::NewAdapter),
    /// Write adapters for made-up frameworks into a copy of the repository, fill them in, and certify them.
    #[command(hide = true)]
    TryNewAdapter,
    /// Compile the kernels of bridge-copy for all architectures; no GPU needed.
    Kernels {
        /// Compare with what is checked in, and change nothing.
        #[arg(long)]
        check: bool,
    },
    /// Check what each feature of the facade brings in, and that the features fit together.
    Features {
        /// Build each feature afresh instead, and print how many crates it takes and how long.
        #[arg(long)]
        time: bool,
    },
    /// Check that every crate that is published can be, and make the packages.
    Package {
        /// Build each package from what is in it alone, and the wheels; install the package's, and run the README.
        #[arg(long)]
        verify: bool,
    },
    /// Build the wheels and look into them; install the package's, and run the README. `package --verify` does it too.
    Wheels,
    /// Build, check and install everything that a release has: the packages of the crates, the wheel and its source, the C
    /// library, hashes, a bill of materials and the notes. They are in target/release-dry-run.
    Release {
        /// Upload nothing. There is no other way yet.
        #[arg(long, required = true)]
        dry_run: bool,
    },
    /// Write another version into every file that states it.
    Version {
        /// The version, such as 0.2.0.
        version: String,
    },
    /// Build the documentation site; broken links are errors.
    Site {
        /// Look at every page in a headless browser, on a phone and a desktop, light and dark, if there is one.
        #[arg(long)]
        look: bool,
        /// Write a picture of every page into this folder.
        #[arg(long, requires = "look")]
        pictures: Option<PathBuf>,
    },
    /// Write the tables and pictures of the documentation from the reports in docs/results.
    Tables {
        /// Compare with what is checked in, and change nothing.
        #[arg(long)]
        check: bool,
    },
    /// Write the header of the C library out of its sources.
    Header {
        /// Compare with what is checked in, and change nothing.
        #[arg(long)]
        check: bool,
    },
    /// Install the C library, with its headers and the files of pkg-config and CMake.
    Install {
        /// The folder above lib and include.
        prefix: PathBuf,
    },
    /// Run the suite on the CPU for each version of Python and of the frameworks that xtask/versions.json names, and write
    /// docs/versions.json. Each is installed into an environment that is removed afterwards.
    Versions {
        /// Run these alone, such as torch or torch==2.9.0; rows of others are kept.
        #[arg(long)]
        only: Vec<String>,
        /// Cases of each pair.
        #[arg(long, default_value_t = 200)]
        cases: u32,
        /// Use this bundle instead of writing one.
        #[arg(long)]
        bundle: Option<PathBuf>,
    },
    /// Write a folder that runs the suite and the benches on a host with Python and frameworks, but without Rust.
    Bundle {
        /// Where to write it.
        out: PathBuf,
        /// The profile of cargo that the libraries are built with.
        #[arg(long, default_value = bundle::RELEASE)]
        profile: String,
        /// Build the suite with faults in the adapters, which `conformance.py --faults` then plants, too.
        #[arg(long)]
        planted: bool,
    },
}

fn main() -> ExitCode {
    let done = match Cli::parse().task {
        Task::Setup => setup().map(|()| ExitCode::SUCCESS),
        Task::Test => check::all(),
        Task::Api { check } => api::write(check).map(|()| ExitCode::SUCCESS),
        Task::Audit => audit::all(),
        Task::Conformance { options } => bundle::conformance(&options),
        Task::Judge { options } => bundle::judge(&options),
        Task::Scoreboard { options } => bundle::scoreboard(&options),
        Task::Bench { options } => bundle::bench(&options),
        Task::Counts { rust, write } => counts::count(rust, write).map(|()| ExitCode::SUCCESS),
        Task::Fuzz { options } => fuzz::run(&options),
        Task::NewAdapter(new) => new_adapter(&new).map(|()| ExitCode::SUCCESS),
        Task::TryNewAdapter => tried::check().map(|()| ExitCode::SUCCESS),
        Task::Kernels { check } => kernels::compile(check).map(|()| ExitCode::SUCCESS),
        Task::Features { time } => {
            let task = if time { features::time } else { features::check };
            task().map(|()| ExitCode::SUCCESS)
        }
        Task::Package { verify } => package::check(verify).map(|()| ExitCode::SUCCESS),
        Task::Wheels => wheels::check().map(|()| ExitCode::SUCCESS),
        Task::Release { dry_run: _ } => release::dry_run().map(|()| ExitCode::SUCCESS),
        Task::Version { version } => version::write(&version).map(|()| ExitCode::SUCCESS),
        Task::Site { look, pictures } => site::build()
            .and_then(|site| if look { site::look(&site, pictures.as_deref()) } else { Ok(()) })
            .map(|()| ExitCode::SUCCESS),
        Task::Tables { check } => site::tables(check).map(|()| ExitCode::SUCCESS),
        Task::Header { check } => header::write(check).map(|()| ExitCode::SUCCESS),
        Task::Install { prefix } => install::install(&prefix).map(|()| ExitCode::SUCCESS),
        Task::Versions { only, cases, bundle } => versions::run(&only, cases, bundle).map(|()| ExitCode::SUCCESS),
        Task::Bundle { out, profile, planted } => {
            let planted = |()| if planted { bundle::plant(&out) } else { Ok(()) };
            bundle::write_as(&out, &profile).and_then(planted).map(|()| ExitCode::SUCCESS)
        }
    };
    done.unwrap_or_else(|error| {
        eprintln!("error: {error}");
        ExitCode::FAILURE
    })
}

/// Writes an adapter into this repository, and says what to do next.
fn new_adapter(new: &new_adapter::NewAdapter) -> run::Result<()> {
    for place in new.write(&run::root())? {
        println!("{}", place.display());
    }
    println!("next: {}", new.first()?);
    Ok(())
}

/// Everything beside Rust that the other commands need. What some tests can do without is named and left out.
fn setup() -> run::Result<()> {
    let python = venv::MAIN.ready()?;
    tensorflow1::folder_if_any(&python);
    if let Err(reason) = venv::PYTHON37.ready() {
        println!("left out: the tests in Python 3.7: {reason}");
    }
    Ok(())
}
