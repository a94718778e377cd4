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
mod release;
mod run;
mod site;
mod tensorflow1;
#[cfg(test)]
mod tried;
mod venv;
mod version;
mod versions;
mod wheels;

use clap::{Args, Parser, Subcommand, ValueEnum};
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
    /// Make or complete the virtual environments in the target folder.
    Setup,
    /// Check everything that can be checked without a GPU, or one part of it.
    Test {
        /// The part: all of them, if none is named.
        part: Option<check::Part>,
    },
    /// Check what takes longer or needs further tools: undefined behaviour, models of threads, the interface, mutants.
    Audit,
    /// Run the conformance suite over the installed frameworks, or with --versions over many versions of them.
    #[command(disable_help_flag = true)]
    Conformance(Passed),
    /// Let a framework's own interchange tests, in a checkout of yours, judge the package.
    #[command(disable_help_flag = true)]
    Judge(Passed),
    /// Judge the frameworks' own interchange of tensors, by programs that need nothing of this project.
    #[command(disable_help_flag = true)]
    Scoreboard(Passed),
    /// Measure transfers against the frameworks' own.
    #[command(disable_help_flag = true)]
    Bench(Passed),
    /// Count the instructions of the host paths under valgrind, and compare them with fixtures/counts.json.
    Counts {
        /// Count the paths in Rust only, which takes a minute.
        #[arg(long)]
        rust: bool,
        /// Write the counts instead.
        #[arg(long)]
        write: bool,
    },
    Fuzz(fuzz::Fuzz),
    /// Write what an adapter for a framework needs: its crate, and its rows in the tables.
    NewAdapter(new_adapter::NewAdapter),
    /// Write the files that are generated from others, or compare them.
    Generate {
        /// Which: all of them, if none is named.
        what: Vec<Generated>,
        /// Compare with what is checked in, and change nothing.
        #[arg(long)]
        check: bool,
    },
    /// Check that every crate can be published and make the packages, or with an option what else a release needs.
    Package(Package),
    /// Build the documentation site; broken links are errors.
    Site {
        /// Look at every page in a headless browser, on a phone and a desktop, light and dark, if there is one.
        #[arg(long)]
        look: bool,
        /// Write a picture of every page into this folder.
        #[arg(long, requires = "look")]
        pictures: Option<PathBuf>,
    },
    /// Write a folder that runs the suite and the benches on a host without Rust, or one with the C library.
    Bundle {
        /// Where to write it.
        out: PathBuf,
        /// Build the suite with faults in the adapters, which `conformance.py --faults` then plants, too.
        #[arg(long)]
        planted: bool,
        /// Add the example over candle, `perceptron`.
        #[arg(long)]
        candle: bool,
        /// Install the C library instead, with its headers and the files of pkg-config and CMake.
        #[arg(long, conflicts_with_all = ["planted", "candle"])]
        c_library: bool,
    },
}

/// The options of a program that has its own, and its own `--help`.
#[derive(Args)]
struct Passed {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    options: Vec<String>,
}

/// Files that are generated.
#[derive(Clone, Copy, ValueEnum)]
enum Generated {
    /// What programs may use of the crates, as lists in fixtures/api.txtar: needs a nightly toolchain.
    Api,
    /// The header of the C library, out of its sources.
    Header,
    /// The kernels of bridge-cuda, compiled for all architectures; no GPU needed.
    Kernels,
    /// The tables and pictures of the documentation, and the lists of frameworks for type checkers.
    Tables,
}

#[derive(Args)]
#[group(multiple = false)]
struct Package {
    /// Build each package from only its own files, and the wheels; install the package's, and run the README.
    #[arg(long)]
    verify: bool,
    /// Check what each feature of the facade brings in, and that the features fit together.
    #[arg(long)]
    features: bool,
    /// Build and check the wheels only.
    #[arg(long)]
    wheels: bool,
    /// Make everything that a release has in target/release-dry-run, and upload nothing.
    #[arg(long)]
    release: bool,
    /// Write this version, such as 0.2.0, into every file that states it.
    #[arg(long, value_name = "VERSION")]
    set_version: Option<String>,
}

impl Package {
    fn run(&self) -> run::Result<()> {
        match self {
            Self { set_version: Some(version), .. } => version::write(version),
            Self { features: true, .. } => features::check(),
            Self { wheels: true, .. } => wheels::check(),
            Self { release: true, .. } => release::dry_run(),
            Self { verify, .. } => package::check(*verify),
        }
    }
}

fn main() -> ExitCode {
    let done = match Cli::parse().task {
        Task::Setup => setup().map(|()| ExitCode::SUCCESS),
        Task::Test { part } => check::run(part),
        Task::Audit => audit::all(),
        Task::Conformance(Passed { options }) => match options.split_first() {
            Some((first, rest)) if first == "--versions" => versions::run(rest).map(|()| ExitCode::SUCCESS),
            _ => bundle::conformance(&options),
        },
        Task::Judge(Passed { options }) => bundle::other("judge", &options),
        Task::Scoreboard(Passed { options }) => bundle::other("scoreboard", &options),
        Task::Bench(Passed { options }) => bundle::other("bench", &options),
        Task::Counts { rust, write } => counts::count(rust, write).map(|()| ExitCode::SUCCESS),
        Task::Fuzz(options) => fuzz::run(&options),
        Task::NewAdapter(new) => new_adapter(&new).map(|()| ExitCode::SUCCESS),
        Task::Generate { what, check } => generate(&what, check).map(|()| ExitCode::SUCCESS),
        Task::Package(package) => package.run().map(|()| ExitCode::SUCCESS),
        Task::Site { look, pictures } => site::build()
            .and_then(|site| if look { site::look(&site, pictures.as_deref()) } else { Ok(()) })
            .map(|()| ExitCode::SUCCESS),
        Task::Bundle { out, c_library: true, .. } => install::install(&out).map(|()| ExitCode::SUCCESS),
        Task::Bundle { out, planted, candle, .. } => {
            let mut extras = [(planted, bundle::PLANTED), (candle, bundle::CANDLE)].into_iter().filter(|extra| extra.0);
            let added = |()| extras.try_for_each(|(_, extra)| bundle::add(&out, extra));
            bundle::write(&out).and_then(added).map(|()| ExitCode::SUCCESS)
        }
    };
    done.unwrap_or_else(|error| {
        eprintln!("error: {error}");
        ExitCode::FAILURE
    })
}

/// Writes or compares generated files: these, or all.
fn generate(what: &[Generated], check: bool) -> run::Result<()> {
    let what = if what.is_empty() { Generated::value_variants() } else { what };
    what.iter().try_for_each(|one| match one {
        Generated::Api => api::write(check),
        Generated::Header => header::write(check),
        Generated::Kernels => kernels::compile(check),
        Generated::Tables => site::tables(check),
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

/// Everything but Rust that the other commands need. What some tests can do without is named and left out.
fn setup() -> run::Result<()> {
    let python = venv::MAIN.ready()?;
    tensorflow1::folder_if_any(&python);
    if let Err(reason) = venv::PYTHON37.ready() {
        println!("left out: the tests in Python 3.7: {reason}");
    }
    Ok(())
}
